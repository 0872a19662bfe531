"""Prompts and a served policy -> groups of rollouts."""
