"""Model folders: finds, verifies, loads and saves them."""
