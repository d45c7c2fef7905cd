"""What a preparation will come to, judged from a sample."""
