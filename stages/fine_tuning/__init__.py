"""Fine-tuning of one encoder on distributions over labels; train-student and train-teachers both use it.

batches.py says which rows make a step, learner.py what is trained, loop.py takes the steps, checkpoint.py lets it
go on after an interruption, prediction.py asks a model.
"""
