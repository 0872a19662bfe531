"""Where a training job runs: local processes or a Kubernetes job, behind one interface."""
