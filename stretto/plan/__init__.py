"""What a job will cost before anything is rented: seconds, bytes and messages of any mesh on any cluster. No torch."""
