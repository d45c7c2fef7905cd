"""The training run: set-up, the loop over steps, and what it saves and reports."""
