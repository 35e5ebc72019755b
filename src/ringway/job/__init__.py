"""Starting and ending the job: discover the launcher, meet the other ranks, choose a backend, create the world."""
