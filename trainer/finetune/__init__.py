"""Fine-tuning a pretrained encoder on labelled text: tables, tasks, fits, comparison, prediction."""
