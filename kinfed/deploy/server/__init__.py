"""The server's side of a deployment: enrolment, checks of answers, the pool of all nodes, status."""
