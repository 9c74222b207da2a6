"""The finished student at work: asked, exported, published. Needs its folder, no teacher and no workspace."""
