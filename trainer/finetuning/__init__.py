"""Fine-tuning a pretrained encoder on labeled text: tables, tasks, fits, comparison, prediction."""
