"""The job: data, model, supervised fine-tuning, and comparing arms on identical data."""
