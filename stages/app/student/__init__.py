"""The finished student: predict, export, push, model card. Needs its folder only."""
