"""Weights from files of other formats than a Hugging Face folder's, under the names that such a folder has."""
