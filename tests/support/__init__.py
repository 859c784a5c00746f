"""Cases, strategies and checks that several test files share."""
