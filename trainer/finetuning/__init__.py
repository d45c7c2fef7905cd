"""Fine-tuning: tables, tasks, fits."""
