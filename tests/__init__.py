"""Tests, in tiers by what they need: values alone, the virtual cluster, real processes over gloo."""
