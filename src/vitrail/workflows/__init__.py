"""What composes the rooms of the library into something a person asks for."""
