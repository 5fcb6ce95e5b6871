"""`python -m spec_lab.doctor drafter=...`: finds out why acceptance is low. Its checks are in docs/doctor.md."""
