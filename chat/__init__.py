"""Messages and a chat template -> token ids, and which of them are trained."""
