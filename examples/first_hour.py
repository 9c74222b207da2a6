# %% [markdown]
# # The first hour, from Python
#
# `amalgam demo` has made an ordinary experiment in `amalgam-demo`; put your own file in its place. In an editor that
# knows `# %%` each part is a cell; `python examples/first_hour.py` runs them all.

# %%
import polars as pl

from amalgam import Experiment

FILE = "amalgam-demo/amalgam.yaml"
experiment = Experiment.load(FILE, quiet=True)

# %% [markdown]
# What would run, and why? After the demo: nothing.

# %%
for stage in experiment.plan():
    print(f"{stage.stage:16} {stage.state:8} {stage.reason or ''}")
experiment.run()

# %% [markdown]
# The teachers' answers, the targets made of them, the texts: lazy frames, joined by key.

# %%
texts, targets = experiment.texts(), experiment.targets
closest = texts.join(targets, on="key").sort("weight").select("text", "weight").head(5).collect()
print("the texts that weigh least in training:")
for text, weight in closest.iter_rows():
    print(f"  {weight:.3f}  {text}")

# %% [markdown]
# Another rule for the targets asks no teacher: seconds. (MUKA's hard rule names one teacher for each text.)

# %%
hard = Experiment.load(FILE, {"student.method": "muka-hard"}, quiet=True)
hard.run(until="build-targets")
won = hard.targets.group_by("teacher").agg(pl.len().alias("texts")).sort("teacher").collect()
print("how many texts each teacher wins:")
for teacher, count in won.iter_rows():
    print(f"  {teacher}: {count:,}")

# %% [markdown]
# The student beside everything else, on labelled texts it has not seen.

# %%
print(experiment.evaluation.select("system", "accuracy", "macro_f1").collect())

# %% [markdown]
# And what it says of new texts, with what each teacher's labels hold of the probability.

# %%
print(experiment.predict(["the chef fried the onion", "the court heard the banker"], explain=True).collect())

# %% [markdown]
# Texts need not be in a file: a datasets.Dataset, a frame or an Arrow table will do. They are written into the
# workspace once, and known by their content: texts that were asked before are not asked again.

# %%
some = texts.select("text").head(20).collect()
smaller = Experiment.load(FILE, texts={"train": some}, quiet=True)
print([(stage.stage, stage.state) for stage in smaller.plan()])
