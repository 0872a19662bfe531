"""Reward functions that behave badly, importable by worker processes."""

import os
import time


def one(prompt, completion, record):
    return 1


def record_value(prompt, completion, record, factor=1.0):
    return factor * record["value"]


def raises(prompt, completion, record):
    raise KeyError("no such answer")


def hangs(prompt, completion, record):
    time.sleep(60)


def hangs_on_x(prompt, completion, record):
    if completion == "x":
        time.sleep(60)
    return 1.0


def dies(prompt, completion, record):
    os._exit(9)


def says_nan(prompt, completion, record):
    return float("nan")


def says_none(prompt, completion, record):
    return None


def says_true(prompt, completion, record):
    return True


not_callable = 3
