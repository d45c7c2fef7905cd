"""Fine-tuning on labeled text: tables, tasks, fits."""
