"""How a model is sharded, run and stepped: one small interface, one file an engine."""
