"""What tests share: real servers, real clients, and traffic."""
