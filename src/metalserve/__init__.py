"""From bare-metal NVIDIA GPU hosts to a proven OpenAI-compatible endpoint."""
