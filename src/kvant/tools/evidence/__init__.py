"""What ``kvant evidence`` measures and checks: this machine and a model, in one file."""
