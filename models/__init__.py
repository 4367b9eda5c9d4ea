"""Train steps in plain flax to plan, verify and benchmark; nothing here knows of shardplan.

Each module has a factory, `train_step(**options) -> (step, args)`, with `step(state, batch) -> (state, loss)` pure and
`args = (state, batch)` abstract unless `concrete=True`, and trains on real data when run: `python -m models.gpt --steps 20`.
"""
