"""Objectives of the student: one class per value of `objective.name`."""
