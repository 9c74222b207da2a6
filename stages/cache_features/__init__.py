"""What an encoder makes of each text, kept for the methods that ask for it."""
