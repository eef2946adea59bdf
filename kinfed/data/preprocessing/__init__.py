"""Tables as they are: what each column is, learnt as statistics that sites could send, and what it becomes."""
