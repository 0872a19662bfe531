"""The pipelines that Muster ships: `grpo` is a KFP pipeline; `local` runs it on this machine, `cluster` submits it."""

if __name__ != "muster.pipelines":
    raise ImportError(f"this package has one name: import muster.pipelines, not {__name__}")
