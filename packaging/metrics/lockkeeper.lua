-- What `INFO lockkeeper` says, for redis_exporter's --script: names and numbers in turn, as strings.
-- redis_exporter itself knows only the fields of the server.
local metrics = {}
for name, number in redis.call('INFO', 'lockkeeper'):gmatch('(lockkeeper_[%w_]+):(%d+)') do
    metrics[#metrics + 1] = name
    metrics[#metrics + 1] = number
end
return metrics
