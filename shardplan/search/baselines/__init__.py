"""Shardings that people use today, each solved at its best in the tables of the plan.

`recipes` are the layouts that a baseline allows, `batch_dims` and `megatron` say which dims these recipes cut, `heuristics` are
the simple ones, `rivals` solves them, and `tofu_premise` is Tofu's premise that every tensor is cut by every factor.
"""
