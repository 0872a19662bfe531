"""The training room: a training batch -> a new policy.

One job is `torchrun ... -m muster.training --config run.yaml --version K --batch DIR`; `trainer.py` tells it from top
to bottom. Importing the package imports neither torch nor transformers.
"""
