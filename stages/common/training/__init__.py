"""Fine-tuning: loop, losses, checkpoints."""
