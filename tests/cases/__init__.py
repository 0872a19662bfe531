"""Groups written short, with the right answers: data for the tests of assembly."""
