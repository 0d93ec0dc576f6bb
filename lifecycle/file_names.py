"""Files of a run's directory, by name; imports nothing, so that whoever only reads them needs no torch."""

METRICS_FILE = "training_metrics_0.jsonl"
VALIDATION_FILE = "validation_metrics_0.jsonl"
PARAMS_FILE = "training_params.json"
