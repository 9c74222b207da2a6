"""Stages: what amalgam does, one folder a stage; `stages.pipeline` names them in order."""
