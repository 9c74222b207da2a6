"""What is missing will cost: time, memory, disk."""
