mod lease;
