"""mini_trainer: fine-tuning in the Hugging Face format (see README.md)."""

__version__ = "0.1.0"
