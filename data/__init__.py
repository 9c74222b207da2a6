"""Texts, labels and Parquet tables. No models, no stages."""
