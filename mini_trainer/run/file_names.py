"""Names of files in a run's directory, and kinds of exports; imports nothing, so that readers do not need torch."""

METRICS_FILE = "training_metrics_0.jsonl"
VALIDATION_FILE = "validation_metrics_0.jsonl"
SAMPLES_FILE = "samples_0.jsonl"  # answers to --sample-prompts
PARAMS_FILE = "training_params.json"
EXPORTS_DIR = "hf_format"
NOTES_FILE = "notes.txt"  # what somebody writes about a run, for the board
LATEST = "latest"  # beside exports: a link to the newest one that is not the best or an average
REGULAR, BEST, AVERAGE = "regular", "best", "average"  # kinds of exports
