"""The training state, its optimizer and schedule, and its checkpoints."""
