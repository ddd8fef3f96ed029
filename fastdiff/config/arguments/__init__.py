"""What the parsers of all commands share: types of arguments, help, answers to unknown flags."""
