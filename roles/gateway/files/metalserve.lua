-- Managed by metalserve (role gateway).

-- Writes the request's priority into its body: engines read it there and from no header. It is put behind everything
-- that the client wrote, and JSON readers take the last of equal names, so a client cannot set one of its own.
local Priority = {id = "priority", flags = filter.FLT_CFG_FL_HTX}
Priority.__index = Priority

function Priority:new()
  return setmetatable({}, Priority)
end

function Priority:start_analyze(txn, channel)
  if not channel:is_resp() then
    filter.register_data_filter(self, channel)
  end
end

function Priority:http_payload(txn, message)
  if message.channel:is_resp() or self.done then
    return
  end
  if not message:eom() then
    return 0
  end
  -- The configuration lets only bodies through that end with a brace.
  local body = message:body()
  local place = body:match("^.*()}")
  -- Of one length, 18 bytes, which the configuration adds to Content-Length.
  message:insert(string.format(',"priority":%6d', txn:get_var("txn.engine_priority") or 0), place - 1)
  self.done = true
end

core.register_filter("priority", Priority, function(priority, args) return priority end)

-- Notes the token counts of an answer for the access log. A stream carries them in its last event, when asked for.
local Usage = {id = "usage", flags = filter.FLT_CFG_FL_HTX}
Usage.__index = Usage

function Usage:new()
  return setmetatable({}, Usage)
end

function Usage:start_analyze(txn, channel)
  if channel:is_resp() then
    filter.register_data_filter(self, channel)
  end
end

function Usage:http_payload(txn, message)
  local data = message:body()
  if data and data:find('"usage"', 1, true) then
    local prompt = data:match('"prompt_tokens"%s*:%s*(%d+)')
    local completion = data:match('"completion_tokens"%s*:%s*(%d+)')
    if prompt then txn:set_var("txn.prompt_tokens", tonumber(prompt)) end
    if completion then txn:set_var("txn.completion_tokens", tonumber(completion)) end
  end
end

core.register_filter("usage", Usage, function(usage, args) return usage end)
