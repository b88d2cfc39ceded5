"""Helpers of tests: real servers, real clients, and traffic."""
