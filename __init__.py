"""mini_trainer: fine-tuning in the Hugging Face format (see README.md)."""
