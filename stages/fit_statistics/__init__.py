"""How foreign a text is to each teacher: Gaussians of its states, fitted once and kept."""
