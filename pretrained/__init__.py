"""Models in the Hugging Face format: their files, and the parts of transformers' model classes."""
