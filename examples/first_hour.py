# %% [markdown]
# # The first hour, from Python
#
# `amalgam demo` creates an ordinary experiment in `amalgam-demo`; replace it by your own file. Editors that support
# `# %%` show each part as a cell. `python examples/first_hour.py` runs all of them.

# %%
import polars as pl

from amalgam import Experiment

FILE = "amalgam-demo/amalgam.yaml"
experiment = Experiment.load(FILE, quiet=True)

# %% [markdown]
# The plan lists the stages that would run, with the reason. After the demo all are current.

# %%
for stage in experiment.plan():
    print(f"{stage.stage:16} {stage.state:8} {stage.reason or ''}")
experiment.run()

# %% [markdown]
# Predictions, targets and texts are lazy frames, joined by key.

# %%
texts, targets = experiment.texts(), experiment.targets
closest = texts.join(targets, on="key").sort("weight").select("text", "weight").head(5).collect()
print("the texts with the lowest weight in training:")
for text, weight in closest.iter_rows():
    print(f"  {weight:.3f}  {text}")

# %% [markdown]
# Another target method runs no teacher and takes seconds. (MUKA's hard rule names one teacher for each text.)

# %%
hard = Experiment.load(FILE, {"student.method": "muka-hard"}, quiet=True)
hard.run(until="build-targets")
won = hard.targets.group_by("teacher").agg(pl.len().alias("texts")).sort("teacher").collect()
print("texts won by each teacher:")
for teacher, count in won.iter_rows():
    print(f"  {teacher}: {count:,}")

# %% [markdown]
# Student, teachers and baselines on labelled test texts.

# %%
print(experiment.evaluation.select("system", "accuracy", "macro_f1"))

# %% [markdown]
# Predictions for new texts, with each teacher's share of the probability.

# %%
print(experiment.predict(["the chef fried the onion", "the banker approved the loan"], explain=True))

# %% [markdown]
# Texts can also be a datasets.Dataset, a frame or an Arrow table. The workspace stores them once, by content. Teachers
# run only on new texts.

# %%
few_texts = texts.select("text").head(20).collect()
smaller = Experiment.load(FILE, texts={"train": few_texts}, quiet=True)
print([(stage.stage, stage.state) for stage in smaller.plan()])
