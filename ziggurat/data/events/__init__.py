"""Events of users to samples: what each user did, and what came next."""
