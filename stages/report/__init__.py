"""Measures teachers, ensemble and student on labelled test texts, and writes the report."""
