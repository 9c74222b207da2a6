"""Optional stage: fits Gaussians to each teacher's states, to measure how far a text lies from them."""
