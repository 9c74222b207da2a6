"""Stages: what amalgam does, one folder a stage; order.py has them in order."""
